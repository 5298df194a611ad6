"""The critic: value model and value loss."""
