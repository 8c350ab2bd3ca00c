"""The built-in models, trained by this project's own commands (tools/make_assets.py); their card is README.md."""
