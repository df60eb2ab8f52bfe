"""Devices and fakes that tests share."""
