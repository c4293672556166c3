"""Foreword."""
