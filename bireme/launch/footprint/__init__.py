"""What an engine takes of memory, out of config.json and the heads of files, before anything is started."""
