"""Headway's wire contract (`headway.v1`) and its client.

>>> from headway.client import Client, Sampling
>>> with Client("127.0.0.1:50051") as client:
...     for event in client.generate("Once upon a time", Sampling(max_tokens=32)):
...         print(event)
"""
