"""Thin Ray shells around the engine, the router and the coordinator. No decisions are made here."""
