"""The router's middle: token logs, the choice of engine, and the links to the engines. asyncio only."""
