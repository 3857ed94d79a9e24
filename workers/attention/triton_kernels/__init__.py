"""Own GPU kernels in Triton. Nothing outside `triton_backend` imports them: triton is optional,
and with TRITON_INTERPRET=1 it must be set before triton is first imported."""
