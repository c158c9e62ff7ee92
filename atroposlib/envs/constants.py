"""Names of the groups of settings in YAML files and on the command line (`--env.group_size 8`)."""

ENV_NAMESPACE = "env"
OPENAI_NAMESPACE = "openai"
SERVER_MANAGER_NAMESPACE = "server"
NAMESPACE_SEP = "."
