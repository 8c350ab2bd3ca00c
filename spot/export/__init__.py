"""A model as one file that runs elsewhere: ONNX and torch.export, and a runtime that needs no torch.

`graph` is the model as it is written, with windows as `flat` reads them, `files` writes it, `verify` runs what was
written against the model, and `runtime` (numpy, Pillow and ONNX Runtime alone) runs it. What a
file says of itself is in `about`.
"""
