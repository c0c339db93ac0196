"""Files to run a server from: a Dockerfile, a unit of systemd, and examples for Kubernetes, Compose and nginx."""
