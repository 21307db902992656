"""What an engine does on a GPU and nowhere else. Little of it needs one: tests run the same code on a CPU."""
