"""When does curvature help? Small studies on digits that change one thing each."""
