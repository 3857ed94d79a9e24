"""The router's middle: token logs, the choice of engine, the links to the engines. asyncio only."""
