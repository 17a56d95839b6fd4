"""The log in a Kafka cluster: `log = "kafka://host:port,…"`."""
