"""All-to-all of token rows; `flat` sends each row straight to its destination."""
