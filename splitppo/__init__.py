"""What both sides of the wire share: contract, batches, configuration, RPC. numpy only, never torch."""

__version__ = "0.1.0"
