from hypothesis import given
from hypothesis import strategies as st
from isobatch_gateway.sse import EventBuffer, server_error_code

events = st.lists(
    st.binary(min_size=1, max_size=30).map(
        lambda b: b"data: " + b.replace(b"\n", b"").replace(b"\r", b"") + b"\n\n"
    ),
    max_size=8,
)


@given(events, st.lists(st.integers(1, 20)), st.binary(max_size=10))
def test_any_cut_of_a_stream_gives_whole_events_and_the_same_bytes(
    whole: list[bytes], cuts: list[int], tail: bytes
) -> None:
    stream = b"".join(whole) + b"data: " + tail.replace(b"\n", b"x")
    buffer, out, at = EventBuffer(), [], 0
    for size in [*cuts, len(stream)]:
        out.append(buffer.feed(stream[at : at + size]))
        at += size

    assert all(piece == b"" or piece.endswith(b"\n\n") for piece in out)
    assert b"".join(out) == b"".join(whole)
    assert b"".join(out) + buffer.rest() == stream


def test_events_that_end_in_carriage_returns_are_whole_too() -> None:
    buffer = EventBuffer()

    assert buffer.feed(b"data: 1\r\n\r\ndata: 2\r\n") == b"data: 1\r\n\r\n"
    assert buffer.feed(b"\r\n") == b"data: 2\r\n\r\n"


def test_only_a_server_error_at_the_beginning_counts() -> None:
    assert server_error_code(b'data: {"error": {"code": 500}}\n\n') == 500
    assert server_error_code(b'data: {"error": {"code": 400}}\n\n') is None
    assert server_error_code(b'data: {"error": broken\n\n') is None
    assert server_error_code(b'data: {"choices": []}\n\n') is None
