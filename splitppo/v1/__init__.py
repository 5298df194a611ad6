"""Stubs generated from proto/splitppo/v1 by `make proto`; never edited by hand."""
