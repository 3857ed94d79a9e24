"""Pure scheduling core: standard library only, no clock reads, no I/O, no logging.

Everything here is driven from outside (`now` is a parameter), so the engine, the
simulator and the property tests run the very same classes.
"""
