"""The engine hop: one TCP connection per router and engine, MessagePack frames both ways."""
