"""How a group notices that it has failed, and what it does then."""
