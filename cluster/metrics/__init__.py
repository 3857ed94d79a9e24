"""What an operator measures: every metric of routers and engines, how it is counted and served."""
