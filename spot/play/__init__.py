"""The playground: a local page for placing tokens by hand, with immediate predictions.

pictures.py   the images that can be shown: samples, and uploads in memory
session.py    the page's requests to models
worker.py     one thread for all computation; the newest request replaces older ones
server.py     HTTP and WebSocket on 127.0.0.1, with access control
page/         the page: one HTML file with its own scripts and style
"""
