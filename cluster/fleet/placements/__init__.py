"""Which engine a token log is (re)played on: policies, one per file."""
