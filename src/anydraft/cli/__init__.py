"""The command-line tool. `main.main` is its entry point; each module here adds its commands."""
