"""Four hosts on one machine; `make test-cluster` runs these tests, nothing else does."""
