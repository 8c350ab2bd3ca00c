"""The playground: a local page on which tokens are placed by hand and the model answers at once.

pictures.py   the images that can be shown: samples known from the start, and uploads in memory
session.py    everything the page asks of a model
worker.py     one thread for all of it, in which the newest request wins
server.py     HTTP and WebSocket on 127.0.0.1, and who may use them
page/         the page: one HTML file with its own scripts and style
"""
