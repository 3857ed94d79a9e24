"""The front door: gRPC in, `TokenSource` behind it. Never talks to an engine itself."""
