"""One command for a GPU machine: are the kernels right, how fast are they, and the engine on them."""
