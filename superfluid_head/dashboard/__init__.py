"""The dashboard: files that a browser gets as they are, and the routes that hand them out. They hold no data."""
