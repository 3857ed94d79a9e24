"""Load tests that measure the gaps between tokens and say whether they may be believed.

`locust -f loadtests/locustfile.py --host HOST:PORT`, or `headway loadtest run` without Locust.
"""
