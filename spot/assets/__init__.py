"""The built-in models, trained by this project's own commands (make.py); their card is README.md."""
