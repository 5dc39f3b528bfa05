"""Environments behind an OpenEnv or MCP server, made usable for the tool loop."""
