"""Deep networks block by block: where they are narrow, and what each block keeps."""
