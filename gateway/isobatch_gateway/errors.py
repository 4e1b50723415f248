"""Names what can go wrong inside the gateway. Refusals of a request are values: see `refusals`."""


class GatewayError(Exception):
    """Base of every error that the gateway raises itself."""


class SettingsInvalid(GatewayError):
    """A setting, file or address that the gateway cannot start with; the message says why."""


class LedgerUnavailable(GatewayError):
    """A record of the receipt ledger is not durable; the message says why."""


class UpstreamError(GatewayError):
    """A replica did not answer as it should. The message is for the log, never for a client."""


class ConnectFailed(UpstreamError):
    """Nobody accepted the connection."""


class ConnectTimedOut(UpstreamError):
    """No connection came about in time: the replica may be gone, or this machine busy."""


class ConnectionDied(UpstreamError):
    """The connection ended before the answer did."""


class BadAnswer(UpstreamError):
    """What came back was no HTTP, or not the certified worker that was expected."""


class ServerFailed(UpstreamError):
    """The replica answered 5xx, or began its stream with an error of its own."""


class FirstByteTimedOut(UpstreamError):
    """No byte of the answer came in time."""


class ReplicaSilent(UpstreamError):
    """The replica was found hung and was taken out while this request waited for it."""


class IdleTimedOut(UpstreamError):
    """The answer stopped in the middle for too long."""


class Interrupted(GatewayError):
    """Work that was ended from outside, whatever it was doing."""


class ClientGone(Interrupted):
    """The client closed its connection."""


class ClientStalled(Interrupted):
    """The client stopped reading its answer."""


class TotalTimedOut(Interrupted):
    """The request took longer than any request may."""


class DrainDeadline(Interrupted):
    """The gateway is stopping and this request did not finish in time."""
