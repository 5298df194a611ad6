"""Advantage estimators: token rewards in, advantages and returns out; one file per family, and a registry."""
