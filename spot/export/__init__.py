"""A model as one file that runs elsewhere: ONNX and torch.export, and a runtime that needs no torch.

`graph` is the module that is exported, with windows from `flat`. `files` writes it, `verify` compares the file's
outputs with the model's, and `runtime` (which needs only numpy, Pillow and ONNX Runtime) runs it. A file's own
description is called `about`.
"""
