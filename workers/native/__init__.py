"""CPU kernels in C++: compiled once on the machine that runs them, called through ctypes.

No torch headers, hence no ABI tie: torch 2.4 and 2.13 use the same library. Calls release the
GIL. Where nothing can be compiled, torch's own operators do the work.
"""
