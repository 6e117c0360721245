"""Measurements; threads within operations wait as they do in the commands."""

from esper_soa.system.cores import let_threads_sleep

let_threads_sleep()
