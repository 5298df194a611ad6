"""The options of gRPC channels and servers, the same in every process.

gRPC keepalive finds a dead peer or network within about 4 s (`ping_timeout_ms` must be set too, or a frozen peer is
missed). A hung Python process still answers pings, and is found by its missing progress instead. Servers allow the
pings that clients send. gRPC's own retries are off: the client repeats a call under its request id, so that it joins
the running call.
"""

from collections.abc import Sequence

Options = Sequence[tuple[str, int]]

# A batch header holds the row lengths of all columns and is the largest message (MAX_BATCH_ROWS rows of 11 columns in
# three bytes each are 4.3 MB, stored rows of two more and their lengths at most 2.1 MB); chunks are 1 MiB. gRPC takes a
# message into memory before anybody can look at it.
MAX_MESSAGE_BYTES = 8 << 20

# The connections of a server. A further connection is closed at once; open ones stay.
MAX_CONNECTIONS = 64

_BOTH: Options = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.max_frame_size", (1 << 24) - 1),  # the maximum of HTTP/2: fewer frames take less CPU per MiB
    ("grpc.keepalive_permit_without_calls", 1),
)

CLIENT_OPTIONS: Options = (
    *_BOTH,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Despite its name the time that one attempt to connect has, handshakes included (MIN_CONNECT_TIMEOUT in gRPC's
    # doc/connection-backoff.md). The pause after an attempt that was refused is bounded by the two options above.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    # A proxy from the environment would see plaintext and tokens, also of calls to loopback addresses.
    ("grpc.enable_http_proxy", 0),
)

# An attempt to connect ends before the call, so that its error says how far it came.
_CONNECT_FRACTION = 0.9


def answering_within(timeout_s: float) -> list[tuple[str, int]]:
    """Returns channel options of a gRPC client that gives up a silent address after `timeout_s` seconds."""
    attempt_ms = max(1, int(timeout_s * _CONNECT_FRACTION * 1000))
    return [*{**dict(CLIENT_OPTIONS), "grpc.min_reconnect_backoff_ms": attempt_ms}.items()]


SERVER_OPTIONS: Options = (
    *_BOTH,
    ("grpc.so_reuseport", 0),  # else a second worker could share a port that is taken
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    # The calls of a client that vanished end after the sum of these two times.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Strangers must not use up the files that the process may open, since it writes checkpoints, nor its memory: a call
    # whose caller takes no answer is kept, with or without a token, until its connection ends.
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.max_concurrent_streams", 128),  # per connection; services.max_calls bounds those of all connections
    ("grpc.server_handshake_timeout_ms", 10_000),  # TLS and first frames; gRPC's own default is two minutes
)
