"""Measurements; threads within operations wait as they do in the commands."""

from esper_soa.config.processor import let_threads_sleep

let_threads_sleep()
