"""Read and write safetensors files by byte range, write folders atomically, and read and write URLs."""
