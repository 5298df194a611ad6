"""The one room in which responses are sampled: groups, versions of their weights, and what environments say."""
