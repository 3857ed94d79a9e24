"""Decisions that concern several engines. Pure: core only, no clock, no I/O."""
