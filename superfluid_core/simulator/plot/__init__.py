"""Pictures of runs: shapes, drawn as SVG inside one HTML file, or as PNG pixels."""
