"""The suite around the library: runs, tasks, tables and figures."""
