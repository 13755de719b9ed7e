"""What the library knows of processes and machines: agreement, versions, files, terminals."""
