"""One engine: the step loop around the scheduler and an executor. No Ray, no gRPC, no torch."""
