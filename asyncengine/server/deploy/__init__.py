"""Files to run a server from: a Dockerfile and a unit of systemd."""
