"""The standard pipeline: decodes, counts and watches every topic, without any set-up."""
