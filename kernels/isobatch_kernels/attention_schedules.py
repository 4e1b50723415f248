"""Decides which schedules of the attention tree exist, and which of the admitted ones to launch.

The choice sees what the host knows before a step: counts and upper bounds, no tensor of the device.
So it can be made while a CUDA graph is captured, with the bounds of the graph. It cannot reach the
bits: every admitted schedule has the tree's.
"""

from dataclasses import dataclass

from isobatch_kernels.attention_tree import AttentionShape, AttentionTree

FEW_ROWS = 16
"""Rows of the tile for requests of few tokens: the least an MMA instruction computes."""

TICKET_CHUNKS = 64
"""Most chunks of a context that one program folds: more of them are folded faster by a kernel with
a program for each head."""

WORKSPACE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class AttentionSchedule:
    """`rows` (token, head) pairs a program, `warps`, load `stages`; who folds; how tiles load.

    `split`: chunks go to several programs and a second kernel folds them, or, by `ticket`, the last
    of the programs to store; otherwise a program walks all chunks of its rows. `tma`: tiles come as
    one box each (cache blocks of whole key tiles).
    """

    rows: int
    warps: int
    stages: int
    split: bool = False
    tma: bool = False
    ticket: bool = False

    @property
    def name(self) -> str:
        """As plans and reports name it."""
        kind = "ticket" if self.ticket else "split" if self.split else "fold"
        load = "tma" if self.tma else "pointer"
        return f"{kind}/rows-{self.rows}/warps-{self.warps}/stages-{self.stages}/{load}"


REFERENCE = AttentionSchedule(rows=FEW_ROWS, warps=4, stages=3)
"""What the others are certified against, a query token at a time."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the host knows of a step. `tokens` are all query tokens, the others upper bounds."""

    requests: int
    tokens: int
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: `schedule` for the requests of `min_query`..`max_query` tokens, by `splits`."""

    schedule: AttentionSchedule
    min_query: int
    max_query: int
    splits: int


def schedules(
    shape: AttentionShape, tree: AttentionTree, block_size: int
) -> tuple[AttentionSchedule, ...]:
    """Every schedule for `shape` over cache blocks of `block_size` slots, best first by rows.

    The order is that of an H200: two warps decode 256 requests of 16,384 keys in 4.1 ms, four in
    6.0 ms; boxes take 18.3 us where pointers take 21.3 us for a prompt of 512 tokens. Registers
    bound the list, two float32 accumulators of rows x head size above all. Boxes only from 64 rows
    on: below, operands pass registers, and the second copy of the step that boxes need spilled
    1.4 KB a thread (compiled for sm_90).
    """
    few = [(16, 2, 3), (16, 4, 3), (16, 4, 2)]
    many = [(128, 8, 3), (128, 8, 2), (64, 4, 2), (64, 4, 3), (64, 8, 3), (32, 4, 3), (32, 4, 2)]
    if shape.padded_head > 128:
        many = [(64, 8, 3), (64, 8, 2), (32, 4, 2)]
    boxes = shape.padded_head == shape.head_size and block_size % tree.key_tile == 0
    return tuple(
        AttentionSchedule(rows, warps, stages, split=split, tma=tma, ticket=ticket)
        for rows, warps, stages in few + many
        for tma in ((True, False) if boxes and rows >= 64 else (False,))
        for split, ticket in ((False, False), (True, True), (True, False))
        if rows == FEW_ROWS or not ticket
    )


def chunks_of(tree: AttentionTree, seq_len: int) -> int:
    """Chunks of a context of `seq_len` keys."""
    return -(-seq_len // tree.chunk)


def partial_floats(
    shape: AttentionShape, tree: AttentionTree, query_slots: int, max_seq_len: int
) -> int:
    """float32 values of workspace that a split needs for `query_slots` = requests * max_query."""
    rows = query_slots * shape.heads * chunks_of(tree, max_seq_len)
    # The maxima and the sums each start on a boundary of 128 bytes.
    return rows * shape.padded_head + 2 * _whole(rows)


def _whole(count: int) -> int:
    return -(-count // 32) * 32


@dataclass(frozen=True, slots=True)
class Chooser:
    """Picks launches. `admitted` in order of preference, at least one fold of `FEW_ROWS` rows."""

    shape: AttentionShape
    tree: AttentionTree
    admitted: tuple[AttentionSchedule, ...]
    multiprocessors: int
    workspace_floats: int
    tickets: int

    def __post_init__(self) -> None:
        if not any(s.rows == FEW_ROWS and not s.split for s in self.admitted):
            raise ValueError(f"no fold of {FEW_ROWS} rows is admitted: nothing could serve")

    def launches(self, bounds: Bounds) -> tuple[Launch, ...]:
        """The launches of one step. Decodes beside a prefill get a launch of their own."""
        few = max(1, FEW_ROWS // self.shape.group)
        longest = bounds.max_query_len
        if longest <= few:
            return (self._few(bounds, longest),)
        if bounds.requests == 1 or bounds.tokens == bounds.requests * longest:
            return (self._many(bounds, 1),)
        return self._many(bounds, few + 1), self._few(bounds, few)

    def _few(self, bounds: Bounds, max_query: int) -> Launch:
        """Requests whose rows fit one tile."""
        # 1.75: near two programs a multiprocessor, a split's second launch costs what it fills.
        programs = bounds.requests * self.shape.kv_heads
        return self._launch(bounds, (1, max_query), FEW_ROWS, programs, 1.75)

    def _many(self, bounds: Bounds, min_query: int) -> Launch:
        """Prefills, and the rest."""
        # 0.5: a split moves a float32 row a chunk, which pays only on a card that idles.
        rows = self._rows(bounds)
        tiles = bounds.tokens * self.shape.group // rows + bounds.requests
        programs = tiles * self.shape.kv_heads
        return self._launch(bounds, (min_query, bounds.max_query_len), rows, programs, 0.5)

    def _rows(self, bounds: Bounds) -> int:
        """Rows of a prefill's tile: the most that still fill the card, else the least there are."""
        rows = bounds.tokens * self.shape.group * self.shape.kv_heads
        sizes = [size for size in (128, 64, 32, FEW_ROWS) if self._have(size, split=False)]
        return next((s for s in sizes if rows >= s * self.multiprocessors), sizes[-1])

    def _have(self, rows: int, *, split: bool, ticket: bool = False) -> AttentionSchedule | None:
        wanted = (rows, split, ticket)
        return next((s for s in self.admitted if (s.rows, s.split, s.ticket) == wanted), None)

    def _launch(
        self, bounds: Bounds, queries: tuple[int, int], rows: int, programs: int, full: float
    ) -> Launch:
        """By tiles of `rows`; in splits where `programs` are under `full` a multiprocessor."""
        fold, split = self._have(rows, split=False), self._have(rows, split=True)
        assert fold is not None
        chunks = chunks_of(self.tree, bounds.max_seq_len)
        if chunks <= TICKET_CHUNKS and bounds.requests * self.shape.kv_heads <= self.tickets:
            split = self._have(rows, split=True, ticket=True) or split
        slots = bounds.requests * queries[1]
        if (
            split is None
            or chunks == 1
            or programs >= full * self.multiprocessors
            or partial_floats(self.shape, self.tree, slots, bounds.max_seq_len)
            > self.workspace_floats
        ):
            return Launch(fold, *queries, 1)
        return Launch(split, *queries, min(chunks, -(-4 * self.multiprocessors // programs)))
