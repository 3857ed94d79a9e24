"""`headway doctor`: is this node fit to serve, and do the nodes of a cluster fit each other?"""
