"""Environments behind an OpenEnv or MCP server, as the tool loop wants them."""
