"""MLX as an engine: mlx-lm's models compute, over our pool of blocks."""
